"""Commands: options, one library call, one table."""
