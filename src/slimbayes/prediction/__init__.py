"""From a converted model to numbers: draws of its outputs, and what they say together."""
