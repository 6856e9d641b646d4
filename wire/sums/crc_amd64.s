//go:build !purego

#include "textflag.h"

// The CRC by folding. The octets are the coefficients of a polynomial, the
// first bit of the wire (the lowest bit of the first octet) its highest power;
// the CRC is that polynomial times x^32, modulo P. Modulo P a piece A of the
// polynomial that stands n bits before another piece B is as good as
// A·(x^n mod P) on top of B: so the input is folded up until one piece is left.
//
// In a register octets keep their order, therefore bit 0 is the highest power:
// bit i of a quadword stands for x^(63-i), bit i of 128 for x^(127-i). The
// carry-less product of two quadwords has 127 bits; read as 128 it comes out
// multiplied by x, and each constant is one power of x less to make up for it.
//
// 128 bits are two quadwords, the low one H·x^64 and the high one L. To move
// them n bits up is to add H·(x^(n+63) mod P)·x and L·(x^(n-1) mod P)·x.
// VPCLMULQDQ does so for four lanes of 128 bits at once, $0x00 taking the low
// quadwords and $0x11 the high ones.

// FOLD moves the lanes of acc up by the constants k and adds next to them.
// VPTERNLOGD $0x96 is a three-way exclusive or.
#define FOLD(k, acc, tmp, next) \
	VPCLMULQDQ $0x00, k, acc, tmp   \
	VPCLMULQDQ $0x11, k, acc, acc   \
	VPTERNLOGD $0x96, next, tmp, acc

// func foldCRC(state uint32, p []byte) uint32
TEXT ·foldCRC(SB), NOSPLIT, $0-36
	MOVL            state+0(FP), AX
	MOVQ            p_base+8(FP), SI
	MOVQ            p_len+16(FP), CX
	VMOVD           AX, X4                   // the state, then zeros
	VBROADCASTI32X4 ·fold512(SB), Z9
	CMPQ            CX, $256
	JB              short

	// Four vectors, 256 octets (2048 bits) a turn: one multiplication waits for
	// the one of the turn before, not for its neighbours. The state goes onto the
	// first octets.
	VBROADCASTI32X4 ·fold2048(SB), Z8
	VPXORQ          (SI), Z4, Z0
	VMOVDQU64       64(SI), Z1
	VMOVDQU64       128(SI), Z2
	VMOVDQU64       192(SI), Z3
	ADDQ            $256, SI
	SUBQ            $256, CX
	CMPQ            CX, $256
	JB              join
	PCALIGN         $32

turn:
	FOLD(Z8, Z0, Z4, (SI))
	FOLD(Z8, Z1, Z5, 64(SI))
	FOLD(Z8, Z2, Z6, 128(SI))
	FOLD(Z8, Z3, Z7, 192(SI))
	ADDQ            $256, SI
	SUBQ            $256, CX
	CMPQ            CX, $256
	JAE             turn

join: // Z0, Z1 and Z2 into Z3, which they stand 192, 128 and 64 octets before
	VBROADCASTI32X4 ·fold1536(SB), Z10
	VBROADCASTI32X4 ·fold1024(SB), Z11
	VPCLMULQDQ      $0x00, Z10, Z0, Z4
	VPCLMULQDQ      $0x11, Z10, Z0, Z0
	VPCLMULQDQ      $0x00, Z11, Z1, Z5
	VPCLMULQDQ      $0x11, Z11, Z1, Z1
	VPCLMULQDQ      $0x00, Z9, Z2, Z6
	VPCLMULQDQ      $0x11, Z9, Z2, Z2
	VPTERNLOGD      $0x96, Z4, Z0, Z3
	VPTERNLOGD      $0x96, Z5, Z1, Z6
	VPTERNLOGD      $0x96, Z6, Z2, Z3
	JMP             blocks

short:
	VPXORQ          (SI), Z4, Z3
	ADDQ            $64, SI
	SUBQ            $64, CX

blocks: // Z3 is all up to SI; whole vectors that follow
	CMPQ            CX, $64
	JB              rest
	FOLD(Z9, Z3, Z4, (SI))
	ADDQ            $64, SI
	SUBQ            $64, CX
	JMP             blocks

rest: // r = CX octets are left, fewer than 64
	TESTQ           CX, CX
	JZ              lanes

	// Z3 and the r octets are 64+r octets. Cut them before the last 64 instead of
	// behind the first: r octets of Z3 and then a full vector, the other 64-r of
	// Z3 and the r left. Z3 rotated by r has both parts in their places: the r
	// octets at its end, to be folded, and the 64-r at its start. The octets left
	// come from a load of the last 64 of the input, which reads nothing behind it.
	MOVQ            $64, BX
	SUBQ            CX, BX
	MOVQ            $-1, DX
	BZHIQ           BX, DX, DX               // 64-r ones
	KMOVQ           DX, K1
	KNOTQ           K1, K2
	VPBROADCASTB    CX, Z5
	VPADDB          ·counting(SB), Z5, Z5    // VPERMB looks at six bits of each
	VPERMB.Z        Z3, Z5, K2, Z6
	VPERMB          Z3, Z5, Z3
	VMOVDQU8        -64(SI)(CX*1), K2, Z3
	FOLD(Z9, Z6, Z4, Z3)
	VMOVDQA64       Z6, Z3

lanes: // the first three lanes of Z3 onto its last one
	VMOVDQU64       ·foldLanes(SB), Z5
	VPCLMULQDQ      $0x00, Z5, Z3, Z4
	VPCLMULQDQ      $0x11, Z5, Z3, Z5
	VEXTRACTI32X4   $3, Z3, X6
	VPXORQ          Z4, Z5, Z5
	VEXTRACTI64X4   $1, Z5, Y4
	VPXOR           Y4, Y5, Y5
	VEXTRACTI128    $1, Y5, X4
	VPXOR           X6, X5, X5
	VPXOR           X4, X5, X0

	// X0 is A = H·x^64 + L; wanted is A·x^32 mod P. First M of 96 bits, which
	// H·(x^95 mod P)·x + L·x^32 is congruent to; it stands x^32 up, so that its
	// upper 64 bits Mh fill the low quadword, and its lower 32 the third dword.
	VMOVDQU         ·reduce(SB), X1
	VPCLMULQDQ      $0x00, X1, X0, X2
	VPSRLDQ         $8, X0, X0
	VPXOR           X0, X2, X0

	// Barrett: the quotient q of M and P is the upper half of Mh·floor(x^96/P),
	// exactly. The constant is that without its last bit, which cannot reach the
	// upper half, and the product makes up for the power it lacks. The rest is
	// M - q·P, whose lower 32 bits stand in the third dword again.
	VPCLMULQDQ      $0x10, X1, X0, X2
	VMOVQ           ·reduce+16(SB), X1
	VPCLMULQDQ      $0x00, X1, X2, X2
	VPXOR           X0, X2, X0
	VPEXTRD         $2, X0, AX
	MOVL            AX, ret+32(FP)
	VZEROUPPER
	RET
