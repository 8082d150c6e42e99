"""What holds state, in memory or files: names, dtypes, shapes, and where each box has its elements.

- ``archive``: the types; ``walk``: nested values; ``header``: small values as text; ``texts``: of
  files that are not trusted
- ``reader``: the values, through a buffer of bounded size; ``blocks``: checksums of bytes;
  ``threads``: work on many tensors"""
