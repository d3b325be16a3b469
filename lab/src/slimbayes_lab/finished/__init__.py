"""A finished run in use: predictions of files, exports, stacking, diagnoses."""
