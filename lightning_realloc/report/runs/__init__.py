"""Reports of finished and running training runs, as HTML, Markdown or JSON: ``lightning-realloc report``.

Start with `read_run_folder`, which reads a run, and `page_data`, which builds the content of a page from it.
"""
