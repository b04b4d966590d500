"""The table of the guide: seconds from what happens to a job until it has ended."""


def table(found):
    """Write events below each other and kinds of jobs beside each other, in Markdown.

    Where several cases have measured the same, the longest counts.
    """
    events = list(dict.fromkeys(event for _, event, _ in found))
    jobs = list(dict.fromkeys(job for job, _, _ in found))
    longest = {}
    for job, event, seconds in found:
        longest[job, event] = max(seconds, longest.get((job, event), 0))
    lines = [["", *jobs], ["---"] * (1 + len(jobs))]
    for event in events:
        cells = (longest.get((job, event)) for job in jobs)
        lines.append([event, *("" if cell is None else f"{cell:.1f}" for cell in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
