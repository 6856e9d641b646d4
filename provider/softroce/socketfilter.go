package softroce

import (
	"encoding/binary"
	"math"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/roce"
)

// A datagram of a flood costs the more the later it is dropped: a wake-up, a system call, a
// copy. From a call of [Device.FilterFlood] with sources until one with nil, a program of
// classic BPF on the receiving sockets has the kernel drop most of the flood. Such a program
// keeps nothing between packets, so its instructions contain the set of known sources: the
// bits of a keyed hash, found by a tree of comparisons.

const (
	setWords = 256 // of 32 bits
	// The lower bits of a hash are its slice. The upper ones are its word in a set, and
	// its bit in that word.
	sliceMask = verbs.FloodSlices - 1
	setShift  = 32 - 8 - 5
)

// Where a receive socket's filter finds things: offsets from the UDP header on, and from the
// IP header on (SKF_NET_OFF of include/uapi/linux/filter.h).
const (
	atBTH      = 8
	atDETH     = atBTH + roce.BTHLen
	atFrame    = atDETH + roce.DETHLen // without immediate data
	atPacket   = atFrame + 4
	atIPHeader = 1<<32 - 0x100000
)

// A sourceSet is a set of sources and the keys of its hash.
type sourceSet struct {
	v6   bool
	qpn  ib.QPN // of the queue pair that the filter protects
	keys [6]uint32
	bits [setWords]uint32
}

// hash returns the hash of src, as the program computes it. Of an IPv4 GID only the address
// enters.
func (s *sourceSet) hash(src verbs.DatagramSource) uint32 {
	h := uint32(src.QPN) * s.keys[4]
	from := 0
	if !s.v6 {
		from = 3
	}
	for i := from; i < 4; i++ {
		h ^= binary.BigEndian.Uint32(src.GID[4*i:]) * s.keys[i]
		h ^= h >> 15
	}
	return h * s.keys[5]
}

func (s *sourceSet) add(src verbs.DatagramSource) {
	h := s.hash(src) >> setShift
	s.bits[h>>5] |= 1 << (h & 31)
}

// Scratch memory of the program.
const (
	cellHash = iota
	cellWord
)

// program returns the filter. It drops UD datagrams to s.qpn or to a group if they carry an
// IP packet, except Neighbour Discovery and datagrams whose source is in the set or has a
// hash in the slice. It passes everything else.
func (s *sourceSet) program(slice uint32) []bpf.Instruction {
	var p []bpf.Instruction
	add := func(i ...bpf.Instruction) { p = append(p, i...) }
	// A conditional jump reaches 255 instructions, so each has its own pass behind it.
	add(bpf.LoadAbsolute{Off: atBTH, Size: 1}, bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 5},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(transportUD), SkipTrue: 1}, pass)
	add(bpf.LoadAbsolute{Off: atBTH + 4, Size: 4}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: uint32(ib.QPNMask)},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(s.qpn), SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(ib.QPNMulticast), SkipTrue: 1}, pass)
	// X is the length of immediate data.
	add(bpf.LoadAbsolute{Off: atBTH, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(roce.UDSendOnlyImm), SkipTrue: 2},
		bpf.LoadConstant{Dst: bpf.RegX, Val: 0}, bpf.Jump{Skip: 1}, bpf.LoadConstant{Dst: bpf.RegX, Val: 4})
	add(bpf.LoadIndirect{Off: atFrame, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(encap.IPv4), SkipTrue: 8},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(encap.IPv6), SkipTrue: 1}, pass)
	const icmp6, leastND, mostND = 58, 133, 137 // RFC 4861 section 4
	add(bpf.LoadIndirect{Off: atPacket + 6, Size: 1}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: icmp6, SkipFalse: 4},
		bpf.LoadIndirect{Off: atPacket + 40, Size: 1}, bpf.JumpIf{Cond: bpf.JumpLessThan, Val: leastND, SkipTrue: 2},
		bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: mostND, SkipTrue: 1}, pass)
	s.hashing(add)
	add(bpf.StoreScratch{Src: bpf.RegA, N: cellHash}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: sliceMask},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: slice, SkipFalse: 1}, pass)
	add(bpf.LoadScratch{Dst: bpf.RegA, N: cellHash}, bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: setShift + 5})
	p = append(p, s.tree(0, setWords)...)
	add(bpf.StoreScratch{Src: bpf.RegA, N: cellWord},
		bpf.LoadScratch{Dst: bpf.RegA, N: cellHash}, bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: setShift},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 31}, bpf.TAX{},
		bpf.LoadScratch{Dst: bpf.RegA, N: cellWord}, bpf.ALUOpX{Op: bpf.ALUOpShiftRight},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 1, SkipFalse: 1}, pass, bpf.RetConstant{Val: 0})
	return p
}

var pass = bpf.RetConstant{Val: math.MaxUint32}

// hashing appends instructions that leave the hash of the source in A.
func (s *sourceSet) hashing(add func(...bpf.Instruction)) {
	add(bpf.LoadAbsolute{Off: atDETH + 4, Size: 4}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: uint32(ib.QPNMask)},
		bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: s.keys[4]})
	from, at := 0, uint32(8) // of the IPv6 header
	if !s.v6 {
		from, at = 3, 12
	}
	for i := from; i < 4; i++ {
		add(bpf.TAX{}, bpf.LoadAbsolute{Off: atIPHeader + at, Size: 4},
			bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: s.keys[i]}, bpf.ALUOpX{Op: bpf.ALUOpXor})
		add(bpf.TAX{}, bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 15}, bpf.ALUOpX{Op: bpf.ALUOpXor})
		at += 4
	}
	add(bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: s.keys[5]})
}

// tree returns instructions that replace the number in A, from lo to hi-1, by the word of
// s.bits with that index. The program continues after the last of them.
func (s *sourceSet) tree(lo, hi uint32) []bpf.Instruction {
	if hi-lo == 1 {
		return []bpf.Instruction{bpf.LoadConstant{Dst: bpf.RegA, Val: s.bits[lo]}}
	}
	mid := (lo + hi) / 2
	left, right := s.tree(lo, mid), s.tree(mid, hi)
	left = append(left, bpf.Jump{Skip: uint32(len(right))})
	p := []bpf.Instruction{
		bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: mid, SkipFalse: 1},
		bpf.Jump{Skip: uint32(len(left))},
	}
	return append(append(p, left...), right...)
}

// FilterFlood implements [verbs.FloodFilterer].
func (d *Device) FilterFlood(known []verbs.DatagramSource) {
	d.filtering.Lock()
	defer d.filtering.Unlock()
	f := d.filter.Load()
	if known == nil || f == nil || d.closing.Load() {
		for _, r := range d.receivers {
			r.detach()
		}
		return
	}
	if d.sources == nil {
		d.sources = new(sourceSet)
		for i := range d.sources.keys {
			d.sources.keys[i] = uint32(random64()) | 1
		}
	}
	d.slice = (d.slice + 1) % verbs.FloodSlices
	for _, v6 := range []bool{true, false} {
		s := d.sources
		s.v6, s.qpn, s.bits = v6, f.qpn, [setWords]uint32{}
		for _, k := range known {
			if k.GID.Is4() != v6 {
				s.add(k)
			}
		}
		program := assemble(s.program(d.slice))
		for _, r := range d.receivers {
			if r.v6 == v6 && r.th.index == 0 { // datagrams come to it
				r.attach(program)
			}
		}
	}
}

// A filterMark says which drops of a socket count as the filter's: those that the kernel
// counted while the filter was attached. The kernel has one counter for them and for
// overflows of the socket.
type filterMark struct{ from, to uint32 }

// attach puts a program on the socket.
func (r *receiver) attach(program *unix.SockFprog) {
	if m := r.filtered.Load(); m == nil || m.to != math.MaxUint32 {
		r.filtered.Store(&filterMark{from: r.drops(), to: math.MaxUint32})
	}
	if unix.SetsockoptSockFprog(r.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, program) != nil {
		r.dev.count.filterErrors.Add(1)
		r.detach()
	}
}

// detach removes the program from the socket.
func (r *receiver) detach() {
	m := r.filtered.Load()
	if m == nil || m.to != math.MaxUint32 {
		return
	}
	_ = unix.SetsockoptInt(r.fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) // there may be none
	r.filtered.Store(&filterMark{from: m.from, to: r.drops()})
}

// drops returns the kernel's count of the datagrams that the socket has not taken.
func (r *receiver) drops() uint32 {
	var info [16]uint32
	size := uint32(unsafe.Sizeof(info))
	const memInfoDrops = 8 // SK_MEMINFO_DROPS
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(r.fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 || size <= 4*memInfoDrops {
		return r.overflow.Load()
	}
	return info[memInfoDrops]
}

// dropped counts what the kernel has dropped since the last call. n is the kernel's count.
func (r *receiver) dropped(n uint32) {
	c := &r.dev.count
	was := r.overflow.Swap(n)
	if n <= was {
		return
	}
	filtered := uint32(0)
	if m := r.filtered.Load(); m != nil {
		if from, to := max(was, m.from), min(n, m.to); to > from {
			filtered = to - from
		}
	}
	c.rxFiltered.Add(uint64(filtered))
	c.rxOverflow.Add(uint64(n - was - filtered))
}
