package sim

import (
	"fmt"
	"hash/fnv"
	"math/bits"
	"testing"
	"time"

	"ipoibcm/fib"
	"ipoibcm/internal/simfabric"
	"ipoibcm/ipoib"
)

// This file makes one number of all that a world does. Two runs of a seed have
// the same; what differs between them (an order taken from a map, a clock that
// was read, a hash that has a seed of its own) shows here.

// mix takes numbers into the digest.
func (w *world) mix(vs ...uint64) {
	for _, v := range vs {
		w.digest = bits.RotateLeft64((w.digest^v)*0x9e3779b97f4a7c15, 29)
	}
}

func (w *world) mixString(s string) {
	h := fnv.New64a()
	h.Write([]byte(s))
	w.mix(h.Sum64())
}

// traceDigest is the digest of all steps so far and all packets on the network.
func (w *world) traceDigest() uint64 {
	w.mix(w.steps, w.f.Digest())
	return w.digest
}

func (h *host) traceEvent(ev ipoib.Event) {
	h.w.mix(uint64(h.i), uint64(h.now().UnixNano()))
	switch ev := ev.(type) {
	case ipoib.Packet:
		h.w.mix(1, uint64(len(ev.IP)))
	case ipoib.RecvFrame:
		h.w.mix(2, uint64(ev.SrcQPN), uint64(len(ev.Frame)))
	case ipoib.RecvMAD:
		h.w.mix(3, uint64(ev.MAD.QPN), uint64(ev.MAD.Data[0]))
	case ipoib.Wake:
		h.w.mix(4)
	case ipoib.Usage:
		h.w.mix(5)
		for _, u := range ev.Conns {
			h.w.mix(uint64(u.Conn), u.TxOctets, u.RxOctets)
		}
	default:
		h.w.mixString(fmt.Sprintf("%T", ev))
	}
}

func (h *host) traceAction(a ipoib.Action) {
	w := h.w
	switch a := a.(type) {
	case ipoib.SendUD:
		w.mix(1, uint64(a.Link.QPN), uint64(a.MGID[15]), uint64(len(a.Frame)))
	case ipoib.SendCopies:
		for ud := range a.Each() {
			h.traceAction(ud)
		}
	case ipoib.SendConn:
		w.mix(2, uint64(a.Conn), uint64(len(a.Frame)))
	case ipoib.SendMAD:
		w.mix(3, uint64(a.MAD.QPN), uint64(a.MAD.Data[17]))
	case ipoib.FIBAction:
		switch a := a.Action.(type) {
		case fib.SetPath:
			w.mix(4, uint64(a.Path.Kind), uint64(a.Path.Conn), uint64(a.Path.MTU))
			w.mixString(a.Hop.String())
		case fib.SetRoute:
			w.mix(6, uint64(a.New.MTU))
			w.mixString(a.Old.Dst.String() + a.New.Dst.String())
		}
	case ipoib.DestroyQP:
		w.mix(7, uint64(a.Conn))
	case ipoib.Note:
		w.mixString(a.Text)
	default:
		w.mixString(fmt.Sprintf("%T", a))
	}
}

// TestReplay: the same seed gives the same steps and packets at the same times,
// another seed gives others.
func TestReplay(t *testing.T) {
	seen := map[uint64]bool{}
	for _, n := range []int{3, 8} {
		seeds(t, 20, func(w *world) {
			run := func(w *world) (steps, packets uint64) {
				w.storm(storms(n, 5*time.Second))
				w.settle()
				return w.traceDigest(), w.f.Digest()
			}
			x, px := run(w)
			if y, py := run(newWorld(t, w.f.Seed(), simfabric.Options{})); x != y || px != py {
				w.fatalf("digests of steps %x and %x, of packets %x and %x", x, y, px, py)
			}
			if seen[x] {
				w.fatalf("another seed has the same digest %x", x)
			}
			seen[x] = true
		})
	}
}
