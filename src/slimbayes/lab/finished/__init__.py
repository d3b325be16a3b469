"""A finished run in use: predictions of files and over HTTP, exports, stacking, diagnoses."""
