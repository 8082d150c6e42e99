"""What the tests share; its own tests."""
