"""One command per question; each prints a table and can write JSON."""
