"""Counting a listing of nvdisasm; the lines are what it prints for sm_90a code."""

from fovea.cli.disassembly import EXP2, InstructionCounts, count_blocks, count_listing

LISTING = """\
        .type           fovea_fwd_0,@function
.text.fovea_fwd_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0080*/               @P0 EXIT ;
        /*0090*/              @!P1 BRA `(.L_x_3) ;
        /*00a0*/                   UTMALDG.4D [UR8], [UR4], desc[UR6] ;
        /*00b0*/              @UP0 UTMASTG.4D [UR8], [UR4] ;
        /*00c0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8].tnspB, RZ, !UPT ;
        /*00d0*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*00e0*/                   MUFU.EX2 R5, R6 ;
        /*00f0*/                   MUFU.RCP R5, R6 ;
        /*0100*/                   STL.64 [R1+0x8], R2 ;
        /*0110*/                   LDL R3, [R1] ;
.L_x_3:
        /*10120*/                  BRA `(.L_x_3);
"""


def test_listing_counts_each_class_of_instruction():
    assert count_listing(LISTING) == InstructionCounts(
        products=2, exp2=1, tma=2, local_accesses=2, total=12
    )


def test_listing_without_code_counts_nothing():
    counts = count_listing("\t.target\tsm_90a\n")
    assert counts == InstructionCounts(products=0, exp2=0, tma=0, local_accesses=0, total=0)


def test_labels_that_nothing_branches_to_end_no_block():
    assert count_blocks(f".L_x_9:\n{LISTING}") == count_blocks(LISTING)


def test_blocks_end_at_labels_and_tell_exponentials_from_other_functions():
    first, second = count_blocks(LISTING)
    assert (first[EXP2], first["MUFU"], first["HGMMA"], first["BRA"]) == (1, 1, 2, 1)
    assert second == {"BRA": 1}
