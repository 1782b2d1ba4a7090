"""One op a file: its plain oracle first, then the fast path. Nothing here knows a model or a schedule."""
