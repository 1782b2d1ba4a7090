"""Update rules for dense parameters and for table rows, and schedules. Nothing here knows a model class."""
