//go:build !purego

#include "textflag.h"

// The sum of 32-bit words, in vectors of four lanes of 64 bits. ADD takes a
// vector v of them and spoils it: onto all it adds the lanes as they are, losing
// carries out of 64 bits, and onto high their upper halves. The sum of the lower
// halves is all - high·2^32, in 64 bits, which it does not fill.
#define ADD(v, all, high) \
	VPADDQ v, all, all   \
	VPSRLQ $32, v, v     \
	VPADDQ v, high, high

// func addWords(b []byte) uint64
TEXT ·addWords(SB), NOSPLIT, $0-32
	MOVQ         b_base+0(FP), SI
	MOVQ         b_len+8(FP), CX
	VPXOR        X0, X0, X0                 // all, twice, so that additions do
	VPXOR        X1, X1, X1                 // not wait for one another
	VPXOR        X2, X2, X2                 // high, twice
	VPXOR        X3, X3, X3
	SUBQ         $128, CX
	JB           short
	PCALIGN      $32

turn: // four vectors, 128 octets
	VMOVDQU      (SI), Y4
	VMOVDQU      32(SI), Y5
	VMOVDQU      64(SI), Y6
	VMOVDQU      96(SI), Y7
	ADD(Y4, Y0, Y2)
	ADD(Y5, Y1, Y3)
	ADD(Y6, Y0, Y2)
	ADD(Y7, Y1, Y3)
	ADDQ         $128, SI
	SUBQ         $128, CX
	JAE          turn

short:
	ADDQ         $(128-32), CX
	JLT          rest

block:
	VMOVDQU      (SI), Y4
	ADD(Y4, Y0, Y2)
	ADDQ         $32, SI
	SUBQ         $32, CX
	JGE          block

rest: // fewer than 32 octets are left: an odd last one, and r of whole words
	ADDQ         $32, CX
	XORL         AX, AX
	BTRQ         $0, CX
	JCC          even
	MOVBLZX      (SI)(CX*1), AX

even: // the last 32 octets up to there, without those that were added before
	LEAQ         wanted<>(SB), DX
	VMOVDQU      -32(SI)(CX*1), Y4
	VPAND        (DX)(CX*1), Y4, Y4
	ADD(Y4, Y0, Y2)

	// The pairs into one, upper halves to lower halves, the lanes into one.
	VPADDQ       Y1, Y0, Y0
	VPADDQ       Y3, Y2, Y2
	VPSLLQ       $32, Y2, Y3
	VPADDQ       Y2, Y0, Y0
	VPSUBQ       Y3, Y0, Y0
	VEXTRACTI128 $1, Y0, X1
	VPADDQ       X1, X0, X0
	VPSRLDQ      $8, X0, X1
	VPADDQ       X1, X0, X0
	VMOVQ        X0, DX
	ADDQ         DX, AX
	MOVQ         AX, ret+24(FP)
	VZEROUPPER
	RET

// The 32 octets from octet r on are zeros, and at the end r times 0xff.
DATA wanted<>+32(SB)/8, $-1
DATA wanted<>+40(SB)/8, $-1
DATA wanted<>+48(SB)/8, $-1
DATA wanted<>+56(SB)/8, $-1
GLOBL wanted<>(SB), RODATA, $64
