"""From the data that a config names to rows that a network trains and is judged on."""
