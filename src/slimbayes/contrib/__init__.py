"""Adapters to other training libraries."""
