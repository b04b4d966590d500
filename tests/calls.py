"""The steps and refreshes of two workers: jobs that could not end, and jobs that end well."""

#: What the two workers do in jobs that could not end: r is a refresh, s a step.
UNEQUAL = {
    "4 steps against 3": ("rssssr", "rsssr"),
    "4 + 2 steps against 3 + 3": ("rssssrss", "rsssrsss"),
    "one more refresh": ("rssrssrss", "rssssrss"),
    "a break": ("rsrssss", "rssssrssss"),
    "batch sizes": ("r" + 8 * "s" + "r", "r" + 2 * "s" + "r"),
    "only refreshes": ("rsr", "rs" + 400 * "s"),
}

#: The same of jobs that end well; - is a long pause. With dist_async, steps wait for nobody.
EQUAL = {"a slow worker": ("rsssrss", "rss-srss"), "more steps": ("rssssss", "rs")}
