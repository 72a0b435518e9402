"""Files that vLLM's processes load by their paths, and which import nothing of this package."""
