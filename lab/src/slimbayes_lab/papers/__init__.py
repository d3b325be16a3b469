"""Tables and figures of papers: configs with printed numbers beside them, run and compared."""
