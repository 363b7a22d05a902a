"""The Hopper forward kernel: shared memory, barriers and roles, all from the plan.

Lives here: the host entry, the kernel and nothing that computes. Not here: the roles (`load.py`,
`compute.py`) and the plan (`plan/sm90.py`). Source: the algorithm is FlashAttention-3's
(arXiv 2407.08608): warp-specialised TMA loads, ping-pong of consumer warpgroups, overlap of softmax
with the second product inside one.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fovea.kernels.device.cluster import Mailbox, init_mailbox, sync_cluster
from fovea.kernels.device.element_type import element_type
from fovea.kernels.device.key_ranges import KeyRangeTensors
from fovea.kernels.device.kv_walk import BlockListTensors
from fovea.kernels.device.masking import Band
from fovea.kernels.device.mods import ModTable, make_mod_table
from fovea.kernels.device.pages import BOX_COLUMNS, box_layout
from fovea.kernels.device.pipeline import init_ring, make_ring
from fovea.kernels.device.scheduler import TileOrder, num_tiles
from fovea.kernels.device.score import Scalars
from fovea.kernels.device.sequences import counter_of
from fovea.kernels.device.views import as_batch, copy_view
from fovea.kernels.device.work import SPAN_WORDS, WorkRing, clear, work_words
from fovea.kernels.portable.combine import CombineKernel, Merged, Partials
from fovea.kernels.portable.sequence_table import SequenceTableKernel, packed_batch
from fovea.kernels.portable.tensors import Outputs, TmaLoads
from fovea.kernels.sm90.forward import compute, load
from fovea.kernels.sm90.forward.arguments import Packing, Problem, SharedTiles
from fovea.kernels.sm90.wgmma import row_major_layout, transposed_layout
from fovea.plan.roles import WARP_SIZE
from fovea.plan.sequences import SEQUENCE_WORDS
from fovea.plan.sm90 import WORK_STAGES, WORK_WORDS_LIMIT, ForwardPlan
from fovea.plan.sm90_tiles import SHARED_ALIGNMENT, WARPGROUP_ROWS


class Layouts(NamedTuple):
    """Shared-memory layouts of the tiles, stages last."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    o: cute.ComposedLayout


def make_layouts(plan: ForwardPlan) -> Layouts:
    """Return the shared-memory layouts that a plan asks for."""
    dtype = element_type(plan)
    q_stages, apart = plan.q_edge.stages, plan.q_stage_elements
    return Layouts(
        q=row_major_layout(dtype, WARPGROUP_ROWS, plan.head_dim, q_stages, apart),
        k=row_major_layout(dtype, plan.tile_n, plan.head_dim, plan.kv_stages),
        v=transposed_layout(dtype, plan.head_dim_v, plan.tile_n, plan.kv_stages),
        o=row_major_layout(dtype, WARPGROUP_ROWS, plan.head_dim_v, q_stages, apart),
    )


class ForwardKernel:
    """The forward kernel of one plan."""

    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan
        self.merge = None if plan.combine is None else CombineKernel(plan.combine)
        self.make_table = SequenceTableKernel(
            plan.tile_m * plan.cluster, is_paged=plan.page_box > 0
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mMaxScore: cute.Tensor | None,
        mSink: cute.Tensor | None,
        partials: tuple | None,
        counter: cute.Tensor | None,
        lists: tuple | None,
        sequences: tuple | None,
        scalars: tuple,
        integers: tuple,
        captures: tuple | None,
        mod_scalars: tuple | None,
        stream: Any,
    ):
        """Launch the kernel; every shape, stride and number is a run-time value.

        Behind a launch with several parts of the keys follows their merge.
        """
        plan = self.plan
        is_packed, is_paged = plan.features.varlen, plan.page_box > 0
        layouts = make_layouts(plan)
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        shared_op = load_op if plan.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        q_box = (WARPGROUP_ROWS, plan.head_dim)
        k_box = (plan.tile_n, plan.head_dim)
        v_box = (plan.head_dim_v, plan.tile_n)
        o_box = (WARPGROUP_ROWS, plan.head_dim_v)
        stage = (None, None, 0)
        atom_q, tma_q, atom_o, tma_o = None, None, None, None
        if cutlass.const_expr(not plan.packs_heads):
            atom_q, tma_q = cpasync.make_tiled_tma_atom(
                load_op, copy_view(mQ, is_packed=is_packed), cute.slice_(layouts.q, stage), q_box
            )
            atom_o, tma_o = cpasync.make_tiled_tma_atom(
                store_op, copy_view(mO, is_packed=is_packed), cute.slice_(layouts.o, stage), o_box
            )
        k_view = copy_view(mK, is_packed=is_packed, is_paged=is_paged)
        v_view = copy_view(mV, is_packed=is_packed, is_paged=is_paged, is_transposed=True)
        k_layout, v_layout = (cute.slice_(layout, stage) for layout in (layouts.k, layouts.v))
        if cutlass.const_expr(is_paged):
            rows = plan.page_box
            k_box, k_layout = (rows, BOX_COLUMNS), box_layout(k_layout, rows, is_transposed=False)
            v_box, v_layout = (BOX_COLUMNS, rows), box_layout(v_layout, rows, is_transposed=True)
        atom_k, tma_k = cpasync.make_tiled_tma_atom(
            shared_op, k_view, k_layout, k_box, plan.cluster
        )
        atom_v, tma_v = cpasync.make_tiled_tma_atom(
            shared_op, v_view, v_layout, v_box, plan.cluster
        )
        rows_q, heads = mQ.shape[-3], mQ.shape[-2]
        tile_rows = plan.tile_m * plan.cluster
        num_splits = None
        offset, left, right, section_heads, num_ctas = integers
        group_size = heads // mK.shape[-2]
        packing, table, pages = None, None, None
        heads_a_row = 1
        if cutlass.const_expr(plan.packs_heads):
            packing = Packing(mQ, group_size, Partials(*partials))
            num_splits = packing.partials.num_splits
            heads, heads_a_row = mK.shape[-2], group_size
        elif cutlass.const_expr(plan.v_slices > 1):
            num_splits = cutlass.Int32(plan.v_slices)
        if cutlass.const_expr(plan.features.varlen):
            where, table, pages, total_kv = packed_batch(sequences, mK, mV, is_paged=is_paged)
            self.make_table(where, table, rows_q, total_kv, heads_a_row, stream)
            counter = counter_of(table)
            # No sequence has more tiles than its share, and each may round up.
            num_m_tiles = rows_q * heads_a_row // tile_rows + table.num_sequences
            head_rows = heads
        else:
            num_m_tiles = cute.ceil_div(rows_q * heads_a_row, tile_rows)
            head_rows = heads * mQ.shape[0]
        order = TileOrder(
            num_m_tiles=num_m_tiles,
            heads=heads,
            head_rows=head_rows,
            section_heads=section_heads,
            num_splits=num_splits,
        )
        problem = Problem(
            order=order,
            band=Band(offset, left, right, rows_q, mK.shape[-3]),
            group_size=group_size,
            block_lists=BlockListTensors(*lists) if plan.features.block_lists else None,
            key_ranges=KeyRangeTensors(*lists) if plan.features.key_ranges else None,
            counter=counter,
            packing=packing,
            sequences=table,
            pages=pages,
        )
        self.kernel(
            problem,
            Scalars(*scalars),
            make_mod_table(plan.features, captures, mod_scalars),
            TmaLoads(atom_q, tma_q, atom_k, tma_k, atom_v, tma_v),
            Outputs(atom_o, tma_o, mO, mLSE, mMaxScore, mSink),
        ).launch(
            grid=(
                cutlass.min(num_tiles(order), num_ctas // plan.cluster) * plan.cluster,
                1,
                1,
            ),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster, 1, 1),
            stream=stream,
            max_number_threads=(plan.register_threads, 1, 1) if plan.packs_heads else (0, 0, 0),
            min_blocks_per_mp=1,
            # Of few queries the CTAs start while the kernel before them ends, and wait below.
            use_pdl=plan.packs_heads,
        )
        if cutlass.const_expr(plan.packs_heads):
            whole = (as_batch(each, is_packed=is_packed) for each in (mO, mLSE, mMaxScore))
            merged = Merged(*whole, mSink)
            if num_splits > 1:
                self.merge(packing.partials, merged, stream)

    @cute.kernel
    def kernel(
        self,
        problem: Problem,
        scalars: Scalars,
        mods: ModTable,
        tma: TmaLoads,
        outputs: Outputs,
    ):
        """Allocate from the plan, initialise the barriers, run the roles."""
        plan = self.plan
        shared = self._allocate()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (tma.atom_q, tma.atom_k, tma.atom_v, outputs.atom_o):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                init_ring(shared.q, plan.q_edge)
                init_ring(shared.k, plan.k_edge)
                init_ring(shared.v, plan.v_edge)
                init_ring(shared.work.ring, plan.work_edge)
                clear(shared.work, plan.work_edge)
                if cutlass.const_expr(plan.cluster > 1):
                    init_mailbox(shared.mailbox)
        # The copy engine must see the initialised barriers too, not only this CTA's threads.
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(plan.cluster > 1):
            sync_cluster()
        else:
            cute.arch.sync_threads()

        if cutlass.const_expr(plan.packs_heads):
            # The merge may come up where a CTA is done. Every CTA of this grid runs by now, or will
            # without waiting for another to end, so its waiting CTAs keep none of these out.
            cute.arch.griddepcontrol_launch_dependents()
            # What was there before this launch is complete and visible from here on, such as a
            # merge that writes where this kernel reads or reads where it writes.
            cute.arch.griddepcontrol_wait()
        load_role, compute_role = plan.roles
        if warp_idx < load_role.threads // WARP_SIZE:
            cute.arch.setmaxregister_decrease(load_role.registers)
            if warp_idx == 0:
                load.run(plan, problem, tma, shared)
        else:
            cute.arch.setmaxregister_increase(compute_role.registers)
            compute.run(plan, problem, scalars, mods, outputs, shared)
        if cutlass.const_expr(plan.cluster > 1):
            # The other CTA may still have to free a stage here.
            sync_cluster()

    def _allocate(self) -> SharedTiles:
        """Return the shared-memory tiles and rings, at the plan's places."""
        plan = self.plan
        dtype = element_type(plan)
        layouts = make_layouts(plan)
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, plan.num_barriers)
        rings = []
        offset = 0
        for edge in plan.edges:
            rings.append(make_ring(barriers, offset, edge))
            offset += edge.num_barriers
        assert work_words(plan.work_edge) <= WORK_WORDS_LIMIT
        num_words = WORK_STAGES * work_words(plan.work_edge)
        words = smem.allocate_tensor(cutlass.Int32, cute.make_layout(num_words))
        flags = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(WORK_STAGES * plan.tile_m))

        visits, partials = (
            smem.allocate_tensor(cutlass.Int32, cute.make_layout(plan.kv_stages)) for _ in range(2)
        )

        def tile(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(dtype, layout.outer, SHARED_ALIGNMENT, layout.inner)

        # Q and O take turns in the same memory, each with the swizzle of its own width.
        q_or_o = tile(layouts.q if plan.head_dim >= plan.head_dim_v else layouts.o)
        sQ, sO = (
            cute.make_tensor(cute.recast_ptr(q_or_o.iterator, each.inner, dtype), each.outer)
            for each in (layouts.q, layouts.o)
        )
        sK, sV = tile(layouts.k), tile(layouts.v)
        mailbox = None
        if plan.cluster > 1:
            letter = smem.allocate_tensor(cutlass.Int32, cute.make_layout(2), 8)
            mailbox = Mailbox(letter, barriers + offset)
        sequences = None
        if plan.features.varlen:
            layout = cute.make_layout(WORK_STAGES * SEQUENCE_WORDS)
            sequences = smem.allocate_tensor(cutlass.Int32, layout, 16)
        spans = None
        if plan.features.key_ranges:
            layout = cute.make_layout(WORK_STAGES * plan.num_consumers * SPAN_WORDS)
            spans = smem.allocate_tensor(cutlass.Int32, layout, 16)
        work = WorkRing(words, flags, rings[3], sequences, spans)
        return SharedTiles(sQ, sK, sV, sO, *rings[:3], work, visits, partials, mailbox)
