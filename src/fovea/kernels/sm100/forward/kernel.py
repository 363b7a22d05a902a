"""The Blackwell forward kernel: shared and tensor memory, barriers and roles, all from the plan.

Lives here: the host entry, the kernel and nothing that computes. Not here: the roles (`load.py`,
`queries.py`, `mma.py`, `softmax.py`, `epilogue.py`) and the plan (`plan/sm100.py`). Source: the
pipeline is FlashAttention-4's (arXiv 2603.05451): two query tiles in ping-pong, S, P and O in
tensor memory, a thread a row; what differs is written in docs/internals/blackwell_forward.md.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from fovea.kernels.device.cluster import Mailbox, cluster_rank, init_mailbox, sync_cluster
from fovea.kernels.device.element_type import element_type
from fovea.kernels.device.kv_walk import BlockListTensors
from fovea.kernels.device.masking import Band
from fovea.kernels.device.mods import ModTable, make_mod_table
from fovea.kernels.device.next_work import total_tiles
from fovea.kernels.device.pages import BOX_COLUMNS, box_layout
from fovea.kernels.device.pipeline import init_ring, make_ring
from fovea.kernels.device.scheduler import TileOrder, num_tiles
from fovea.kernels.device.score import Scalars
from fovea.kernels.device.views import as_batch, copy_view
from fovea.kernels.device.work import WorkRing, clear, work_words
from fovea.kernels.portable.combine import CombineKernel, Merged, Partials
from fovea.kernels.portable.sequence_table import SequenceTableKernel, packed_batch
from fovea.kernels.portable.tensors import Outputs, TmaLoads
from fovea.kernels.sm100.forward import epilogue, load, mma, queries, softmax
from fovea.kernels.sm100.forward.arguments import Packing, Problem, SharedTiles
from fovea.kernels.sm100.launch_control import Launches, init_launches
from fovea.kernels.sm100.signals import Signals, init_signals
from fovea.kernels.sm100.umma import row_major_layout, transposed_layout
from fovea.plan.roles import WARP_SIZE
from fovea.plan.sequences import SEQUENCE_WORDS
from fovea.plan.sm100 import (
    FIRST_QUERY_WARP,
    LAUNCH_RESPONSE_BYTES,
    LOAD_WARP,
    MMA_WARP,
    TILE_M,
    WORK_STAGES,
    WORK_WORDS_LIMIT,
    ForwardPlan,
)
from fovea.plan.sm100_tiles import SHARED_ALIGNMENT, STREAM_ROWS, STREAMS
from fovea.plan.tensor_memory import TENSOR_COLUMNS


class Layouts(NamedTuple):
    """Shared-memory layouts of the tiles, stages last."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    o: cute.ComposedLayout | None


def make_layouts(plan: ForwardPlan) -> Layouts:
    """Return the shared-memory layouts that a plan asks for."""
    dtype = element_type(plan)
    return Layouts(
        q=row_major_layout(dtype, STREAM_ROWS, plan.head_dim, plan.q_edge.stages),
        k=row_major_layout(dtype, plan.k_rows, plan.head_dim // plan.k_parts, plan.k_stages),
        v=transposed_layout(dtype, plan.v_columns, plan.tile_n // plan.v_parts, plan.v_stages),
        o=row_major_layout(dtype, STREAM_ROWS, plan.head_dim_v, 1) if plan.stages_o else None,
    )


class ForwardKernel:
    """The forward kernel of one plan."""

    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan
        self.merge = None if plan.combine is None else CombineKernel(plan.combine)
        self.make_table = SequenceTableKernel(plan.tile_m, is_paged=plan.page_box > 0)

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
        counter: None,
        lists: tuple | None,
        sequences: tuple | None,
        scalars: tuple,
        integers: tuple,
        captures: tuple | None,
        mod_scalars: tuple | None,
        stream: Any,
    ):
        """Launch the kernel; every shape, stride and number is a run-time value.

        A dynamic plan has a CTA (or pair) for every tile, others at most one for each SM. `counter`
        is the place of Hopper's.

        Behind a launch with several parts of the keys follows their merge.
        """
        plan = self.plan
        is_packed, is_paged = plan.features.varlen, plan.page_box > 0
        layouts = make_layouts(plan)
        group = tcgen05.CtaGroup.TWO if plan.cluster > 1 else tcgen05.CtaGroup.ONE
        load_op = cpasync.CopyBulkTensorTileG2SOp(group)
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        q_box = (STREAM_ROWS, plan.head_dim)
        k_box = (plan.k_rows, plan.head_dim // plan.k_parts)
        v_box = (plan.v_columns, plan.tile_n // plan.v_parts)
        stage = (None, None, 0)
        atom_q, tma_q = None, None
        if cutlass.const_expr(not plan.packs_heads):
            atom_q, tma_q = cpasync.make_tiled_tma_atom(
                load_op, copy_view(mQ, is_packed=is_packed), cute.slice_(layouts.q, stage), q_box
            )
        k_layout, v_layout = (cute.slice_(layout, stage) for layout in (layouts.k, layouts.v))
        k_view = copy_view(mK, is_packed=is_packed, is_paged=is_paged)
        v_view = copy_view(mV, is_packed=is_packed, is_paged=is_paged, is_transposed=True)
        if cutlass.const_expr(is_paged):
            k_box, v_box = (plan.page_box, BOX_COLUMNS), (BOX_COLUMNS, plan.v_page_box)
            k_layout = box_layout(k_layout, plan.page_box, is_transposed=False)
            v_layout = box_layout(v_layout, plan.v_page_box, is_transposed=True)
        atom_k, tma_k = cpasync.make_tiled_tma_atom(load_op, k_view, k_layout, k_box)
        atom_v, tma_v = cpasync.make_tiled_tma_atom(load_op, v_view, v_layout, v_box)
        atom_o, tma_o = None, None
        if cutlass.const_expr(plan.stages_o):
            o_box = (STREAM_ROWS, plan.head_dim_v)
            atom_o, tma_o = cpasync.make_tiled_tma_atom(
                store_op, copy_view(mO, is_packed=False), cute.slice_(layouts.o, stage), o_box
            )
        rows_q, heads = mQ.shape[-3], mQ.shape[-2]
        offset, left, right, section_heads, num_ctas = integers
        group_size = heads // mK.shape[-2]
        packing, num_splits, heads_a_row = None, None, 1
        if cutlass.const_expr(plan.packs_heads):
            packing = Packing(mQ, Partials(*partials))
            num_splits = packing.partials.num_splits
            heads, heads_a_row = mK.shape[-2], group_size
        table, pages = None, None
        if cutlass.const_expr(plan.features.varlen):
            where, table, pages, total_kv = packed_batch(sequences, mK, mV, is_paged=is_paged)
            self.make_table(where, table, rows_q, total_kv, heads_a_row, stream)
            # No sequence has more tiles than its share, and each may round up.
            num_m_tiles = rows_q * heads_a_row // plan.tile_m + table.num_sequences
            head_rows = heads
        else:
            num_m_tiles = cute.ceil_div(rows_q * heads_a_row, plan.tile_m)
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
            packing=packing,
            sequences=table,
            pages=pages,
        )
        num_clusters = num_tiles(order)
        if cutlass.const_expr(not plan.is_dynamic):
            num_clusters = cutlass.min(num_clusters, cutlass.max(num_ctas // plan.cluster, 1))
        self.kernel(
            problem,
            Scalars(*scalars),
            make_mod_table(plan.features, captures, mod_scalars),
            TmaLoads(atom_q, tma_q, atom_k, tma_k, atom_v, tma_v),
            Outputs(atom_o, tma_o, mO, mLSE, mMaxScore, mSink),
        ).launch(
            grid=(num_clusters * plan.cluster, 1, 1),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster, 1, 1) if plan.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
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
        """Run the CTA, unless it is one behind the last tile."""
        if cutlass.const_expr(self.plan.features.varlen):
            # The number of tiles is known on the device alone; the grid is a bound.
            if cute.arch.block_idx()[0] < total_tiles(problem.order, problem.sequences):
                self._run(problem, scalars, mods, tma, outputs)
        else:
            self._run(problem, scalars, mods, tma, outputs)

    @cute.jit
    def _run(
        self,
        problem: Problem,
        scalars: Scalars,
        mods: ModTable,
        tma: TmaLoads,
        outputs: Outputs,
    ):
        """Allocate from the plan, initialise the barriers, run the roles."""
        plan = self.plan
        is_pair = plan.cluster > 1
        shared, address = self._allocate()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        softmax_role, epilogue_role, issue_role = plan.roles
        first_issue_warp = (softmax_role.threads + epilogue_role.threads) // WARP_SIZE
        if warp_idx == first_issue_warp + LOAD_WARP:
            for atom in (tma.atom_q, tma.atom_k, tma.atom_v, outputs.atom_o):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                init_ring(shared.q, plan.q_edge)
                init_ring(shared.k, plan.k_edge)
                if cutlass.const_expr(not plan.shares_ring):
                    init_ring(shared.v, plan.v_edge)
                init_ring(shared.work.ring, plan.work_edge)
                init_signals(shared.signals, plan)
                clear(shared.work, plan.work_edge)
                if cutlass.const_expr(is_pair):
                    init_mailbox(shared.mailbox)
                if cutlass.const_expr(plan.is_dynamic):
                    init_launches(shared.launches)
        if warp_idx == first_issue_warp + MMA_WARP:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, address, is_pair)
            cute.arch.relinquish_tmem_alloc_permit(is_pair)
        # The copy engine must see the initialised barriers too, not only this CTA's threads.
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(is_pair):
            sync_cluster()
        else:
            cute.arch.sync_threads()
        shared = shared._replace(tensor_memory=cute.make_tensor(address, cute.make_layout(1))[0])

        if cutlass.const_expr(plan.packs_heads):
            # The merge may come up where a CTA is done, once every CTA of this grid has started or
            # has been taken over, so its waiting CTAs keep none of these out.
            cute.arch.griddepcontrol_launch_dependents()
        if warp_idx < softmax_role.threads // WARP_SIZE:
            cute.arch.setmaxregister_increase(softmax_role.registers)
            softmax.run(plan, problem, scalars, mods, outputs, shared)
        elif warp_idx < first_issue_warp:
            cute.arch.setmaxregister_decrease(epilogue_role.registers)
            epilogue.run(plan, problem, outputs, shared)
        else:
            cute.arch.setmaxregister_decrease(issue_role.registers)
            if warp_idx == first_issue_warp + LOAD_WARP:
                load.run(plan, problem, tma, shared)
            elif warp_idx == first_issue_warp + MMA_WARP:
                if cutlass.const_expr(is_pair):
                    if shared.rank.is_first:
                        mma.run(plan, problem, shared)
                    else:
                        mma.follow(plan, shared)
                else:
                    mma.run(plan, problem, shared)
            elif warp_idx >= first_issue_warp + FIRST_QUERY_WARP:
                if cutlass.const_expr(plan.packs_heads):
                    queries.run(plan, problem, shared)
        if cutlass.const_expr(is_pair):
            # The other CTA may still multiply into this one's tensor memory, or arrive here.
            sync_cluster()
        if warp_idx == first_issue_warp + MMA_WARP:
            pointer = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)
            cute.arch.dealloc_tmem(pointer, TENSOR_COLUMNS, is_pair)

    def _allocate(self) -> tuple[SharedTiles, cute.Pointer]:
        """Return the tiles and barriers, and where the address of tensor memory will be."""
        plan = self.plan
        dtype = element_type(plan)
        layouts = make_layouts(plan)
        smem = SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, plan.num_barriers)
        rings = {}
        offset = 0
        for edge in plan.edges:
            rings[edge.name] = make_ring(barriers, offset, edge)
            offset += edge.num_barriers
        firsts = []
        for signal in plan.signals:
            firsts.append(barriers + offset)
            offset += signal.stages
        assert work_words(plan.work_edge) <= WORK_WORDS_LIMIT
        num_words = WORK_STAGES * work_words(plan.work_edge)
        words = smem.allocate_tensor(cutlass.Int32, cute.make_layout(num_words))
        address = smem.allocate_array(cutlass.Int32, 1)
        statistics = smem.allocate_tensor(
            cutlass.Float32,
            cute.make_layout(
                (plan.statistics, STREAMS, STREAM_ROWS), stride=(TILE_M, STREAM_ROWS, 1)
            ),
        )
        maxima = None
        if plan.splits_columns:
            maxima = smem.allocate_tensor(
                cutlass.Float32,
                cute.make_layout((2, STREAMS, STREAM_ROWS), stride=(TILE_M, STREAM_ROWS, 1)),
            )
        num_words = WORK_STAGES * plan.flag_words
        flags = smem.allocate_tensor(cutlass.Int32, cute.make_layout(num_words))
        sequences = None
        if plan.features.varlen:
            layout = cute.make_layout(WORK_STAGES * SEQUENCE_WORDS)
            sequences = smem.allocate_tensor(cutlass.Int32, layout, 16)
        mailbox, rank = None, None
        if plan.cluster > 1:
            letter = smem.allocate_tensor(cutlass.Int32, cute.make_layout(2), 8)
            mailbox, rank = Mailbox(letter, barriers + offset), cluster_rank()
            offset += 1
        launches = None
        if plan.is_dynamic:
            layout = cute.make_layout(LAUNCH_RESPONSE_BYTES // 4)
            response = smem.allocate_tensor(cutlass.Int32, layout, LAUNCH_RESPONSE_BYTES)
            launches = Launches(response, barriers + offset)

        def tile(layout: cute.ComposedLayout | None) -> cute.Tensor | None:
            if layout is None:
                return None
            return smem.allocate_tensor(dtype, layout.outer, SHARED_ALIGNMENT, layout.inner)

        sQ, sK = tile(layouts.q), tile(layouts.k)
        if plan.shares_ring:
            start = cute.recast_ptr(sK.iterator, layouts.v.inner, dtype)
            sV = cute.make_tensor(start, layouts.v.outer)
        else:
            sV = tile(layouts.v)
        tiles = (sQ, sK, sV, tile(layouts.o))
        kv_rings = [rings[edge.name] for edge in (plan.q_edge, plan.k_edge, plan.v_edge)]
        work = WorkRing(words, flags, rings["work"], sequences)
        signals, unknown = Signals(*firsts), cutlass.Int32(0)
        beside = (statistics, maxima, mailbox, launches, unknown, rank)
        shared = SharedTiles(*tiles, *kv_rings, work, signals, *beside)
        return shared, address
