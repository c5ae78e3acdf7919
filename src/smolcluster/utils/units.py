"""Numbers with their units, as people read them."""

_BYTE_UNITS = ("kB", "MB", "GB", "TB")


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units: `812 B`, `70.0 MB`."""
    if round(num_bytes) < 1000:
        return f"{num_bytes:.0f} B"
    scaled = num_bytes
    for unit in _BYTE_UNITS:
        scaled /= 1000
        if round(scaled, 1) < 1000 or unit == _BYTE_UNITS[-1]:
            break
    return f"{scaled:.1f} {unit}"


def format_megabytes(num_bytes: float) -> str:
    """Bytes in MB, to two digits at least: `118`, `9.4`, `0.012`; links are told in them, a second."""
    scaled = num_bytes / 1e6
    if scaled >= 9.95:
        return f"{scaled:,.0f}"
    return f"{scaled:.2g}" if scaled >= 0.001 else f"{scaled:.4f}" if scaled >= 5e-5 else "0"


def format_loss(value: float, decimals: int = 4) -> str:
    """A loss to so many decimals; one that is small or large to three digits."""
    is_plain = value == 0 or 0.01 <= abs(value) < 1e4
    return f"{value:.{decimals}f}" if is_plain else f"{value:.3g}"


def format_count(count: int, noun: str) -> str:
    """How many: `1 worker`, `3 workers`, `1,200 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith("tch") else "s"
    return f"{count:,} {noun}{ending}"


def format_rate(bytes_per_s: float) -> str:
    """How much a link carries, as all views tell it: `118 MB/s`."""
    return f"{format_megabytes(bytes_per_s)} MB/s"


def format_duration(seconds: float) -> str:
    """A length of time in its two largest units: `3.3 ms`, `0.4 s`, `12 s`, `1 min 05 s`, `3 d 04 h`."""
    if 0 < seconds < 0.0995:
        thousandths = seconds * 1000
        return f"{thousandths:.2g} ms" if thousandths < 9.95 else f"{thousandths:.0f} ms"
    if seconds < 9.95:
        short = f"{seconds:.1f}"
        return f"{short.removesuffix('.0')} s"
    minutes, secs = divmod(round(seconds), 60)
    if not minutes:
        return f"{secs} s"
    hours, mins = divmod(minutes, 60)
    if not hours:
        return _pair(mins, "min", secs, "s")
    days, hrs = divmod(hours, 24)
    return _pair(days, "d", hrs, "h") if days else _pair(hrs, "h", mins, "min")


def _pair(large: int, large_unit: str, small: int, small_unit: str) -> str:
    rest = f" {small:02d} {small_unit}" if small else ""
    return f"{large} {large_unit}{rest}"


def format_address(host: str, port: int) -> str:
    """`10.10.0.1:65432`, or `[::1]:65432`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
