"""Statistics over a sweep or a lab run, and the report that shows them."""
