"""Golden groups I01 (buckets, resize and crop) and I02 (caption choice): exact."""

from pid_jax.data import buckets, captions, geometry
from tests.golden.cases import Case, handles


@handles("pid", r"I01.*")
def check_buckets(case: Case) -> None:
    _check_tables(case.meta)
    for row in case.meta["rows"]:
        native = tuple(row["wh"])
        if "shard_folder" in row:
            folder = f"aspect_ratio_{buckets.folder_ratio(native).replace(',', '_')}"
            assert folder == row["shard_folder"], native
        for resolution, expected in row.get("single", {}).items():
            assert _single(native, int(resolution)) == expected, (native, resolution)
        for maximum, expected in row.get("multi", {}).items():
            assert _multi(native, int(maximum)) == expected, (native, maximum)


def _check_tables(meta: dict) -> None:
    for resolution, sizes in meta.get("size_table_wh", {}).items():
        assert buckets.SIZES[int(resolution)] == {r: tuple(s) for r, s in sizes.items()}
    for maximum, ratios in meta.get("multi_res_grid_level_w_h", {}).items():
        for ratio, levels in ratios.items():
            ours = buckets.multi_levels(int(maximum), ratio)
            assert [(b.name, b.width, b.height) for b in ours] == [
                (f"L{level}_{ratio}", w, h) for level, w, h in levels], (maximum, ratio)


def _single(native: geometry.Size, resolution: int) -> dict:
    layout = buckets.SingleResolution(resolution)
    bucket = layout.candidate(native)
    placed = geometry.cover(native, bucket.size, layout.min_scale)
    head = {"aspect_ratio": bucket.name, "target_wh": list(bucket.size)}
    if placed is None:
        return head | {"kept": False}
    return head | _placement(placed) | {"upscaled": placed.enlarges}


def _multi(native: geometry.Size, maximum: int) -> dict:
    layout = buckets.MultiResolution(maximum)
    bucket = buckets.assign(layout, native)
    head = {"ar": buckets.nearest_ratio(native, buckets.MULTI_RATIOS)}
    if bucket is None:
        return head | {"kept": False}
    placed = geometry.cover(native, bucket.size, layout.min_scale)
    return head | {"bucket": bucket.name, "target_wh": list(bucket.size)} | _placement(placed)


def _placement(placed: geometry.Placement) -> dict:
    return {
        "kept": True, "resized_wh": list(placed.resized), "resize_called": placed.resizes,
        "crop_xy_actual": list(placed.corner),
        "crop_xy_recorded": [(r - t) // 2 for r, t in zip(placed.resized, placed.target)],
    }


@handles("pid", r"I02.*")
def check_captions(case: Case) -> None:
    for row in case.meta["cases"]:
        offered = captions.extract_captions(row["sample"])
        drawn = {captions.choose(offered, i / 60) if offered else None for i in range(60)}
        assert drawn == set(row["possible_results"]), row["name"]
