"""Run the calls of a dataflow on this rank, iteration by iteration.

Start with `CallRunner.run_iteration`, and follow a batch:

1. `exchange.routing.Routes` works out which rank works on which samples.
2. For each call, `GenerateCalls`, `InferCalls` or `TrainCalls` receives its inputs from `IterationData` and runs.
3. `IterationData.record` keeps the results, and sends them to the ranks that need them in a later call.
4. `RunMetrics` records seconds; an `IterationReport` carries metrics and values per sample to all ranks.
"""
