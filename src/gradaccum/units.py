"""Numbers as people read them."""


def count(number: float) -> str:
    """Return a count with a thousands separator, or with K, M or G from a hundred thousand on.

    >>> [count(n) for n in (7, 4096, 123_456, 2_354_934)]
    ['7', '4,096', '123K', '2.35M']
    """
    if number < 100_000:
        return f"{number:,.0f}"
    for size, suffix in ((1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number / 1e3:.0f}K"


def binary(size: float) -> str:
    """Return a number of bytes.

    >>> [binary(n) for n in (512, 2048, 734_003_200, 5_000_000_000, 3 * 2**40)]
    ['512 B', '2.00 KiB', '700 MiB', '4.66 GiB', '3.00 TiB']
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:#.3g} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def duration(seconds: float) -> str:
    """Return a span of time.

    >>> [duration(s) for s in (0.42, 12.3, 75, 3_725, 90_000)]
    ['0.42 s', '12.3 s', '1:15', '1:02:05', '25:00:00']
    """
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def share(fraction: float) -> str:
    """Return a fraction as a percentage.

    >>> share(0.0414)
    '4.1%'
    """
    return f"{100 * fraction:.1f}%"
