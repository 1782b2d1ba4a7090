"""What is minimised and what is reported."""
