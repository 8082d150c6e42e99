"""FullyShardedDataParallel, and what both front ends have in common, by topic.

- wrapping: which modules become units, their settings, and what a wrapped module is
- parameters: frozen, replaced, written to, offloaded, without values
- training: losses, calls and modules of any kind
- precision: MixedPrecision
- gradients: accumulation, clipping, scaling, communication hooks
- optimizers: made before wrapping, stepping in backward
- meshes: replicas, tensor parallel, many ranks
- errors: what is refused, on every rank
- ranks: calls and units that only some ranks use, and what works after a failure
- parity: with torch, and samples of all settings
"""
