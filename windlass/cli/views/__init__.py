"""Commands that show runs: the page, pictures, reports, comparisons."""
