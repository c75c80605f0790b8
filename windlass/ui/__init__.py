"""See runs on a page: a read-only server, what it reads of run folders, its front end, figures and reports."""
