"""How a draw meets a model: passes and their noise, where rows lie, and the proof of it."""
