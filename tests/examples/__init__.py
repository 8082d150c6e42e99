"""The examples, and the commands and code of README.md and examples/README.md."""
