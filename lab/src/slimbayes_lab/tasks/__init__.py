"""From the data that a config names to rows that a network trains and is judged on. Each file knows those before it:

rows            which rows are taken, and which are refused
own_table       tables of one's own
intake          the door for data of every kind, and the digest that names their rows
task            rows as training takes them: split, limited and scaled
"""
