package agent

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/verbs"
	"ipoibcm/wire/pcapng"
)

const (
	// captureDepth is how many packets may wait for one slow capture client. captureOctets is how many
	// octets may wait for all clients together.
	captureDepth  = 4096
	captureOctets = 32 << 20
	// tapOverhead is how many octets a waiting packet counts in addition to its own.
	tapOverhead = 64
)

// headerLen is how many octets of every packet are kept, however small snap is: the Ethernet header of the
// capture is made from the IP header.
const headerLen = 40

// errFollowers says that a bound was reached.
var errFollowers = errors.New("too many clients follow this agent already")

// taps hands the provider's packets to capture clients. Without clients the
// provider has no tap and pays nothing.
type taps struct {
	provider verbs.Provider
	mu       sync.Mutex
	list     atomic.Pointer[[]*tap]
	dropped  atomic.Uint64
}

type tap struct {
	ch     chan tapped
	snap   int
	octets atomic.Int64 // what waits in ch, overhead included
}

// take queues a packet for the client, unless more than share octets or captureDepth packets would wait for
// it then. It reports whether it did.
func (c *tap) take(at time.Time, out bool, ip []byte, share int64) bool {
	keep := len(ip)
	if c.snap > 0 {
		keep = min(keep, max(c.snap, headerLen))
	}
	size := int64(keep + tapOverhead)
	if c.octets.Add(size) <= share {
		select {
		case c.ch <- tapped{at, out, append([]byte(nil), ip[:keep]...), len(ip)}:
			return true
		default:
		}
	}
	c.octets.Add(-size)
	return false
}

// taken makes way for other packets after p was received from c.ch.
func (c *tap) taken(p *tapped) { c.octets.Add(-int64(len(p.ip) + tapOverhead)) }

type tapped struct {
	at  time.Time
	out bool
	ip  []byte
	n   int // octets before it was cut
}

func (t *taps) packet(out bool, ip []byte) {
	now := time.Now()
	list := *t.list.Load()
	share := captureOctets / int64(max(1, len(list))) // clients that read lose nothing to those that do not
	for _, c := range list {
		if !c.take(now, out, ip, share) {
			t.dropped.Add(1)
		}
	}
}

func (t *taps) add(c *tap) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []*tap
	if old := t.list.Load(); old != nil {
		list = append(list, *old...)
	}
	if len(list) >= maxFollowers {
		return errFollowers
	}
	list = append(list, c)
	t.list.Store(&list)
	t.provider.SetTap(t.packet)
	return nil
}

func (t *taps) remove(c *tap) {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := slices.DeleteFunc(slices.Clone(*t.list.Load()), func(o *tap) bool { return o == c })
	if len(list) == 0 {
		t.provider.SetTap(nil)
	}
	t.list.Store(&list)
}

// capture writes packets to w as pcapng until ctx ends or w fails, flushing
// after each.
func (t *taps) capture(ctx context.Context, w io.Writer, flush func(), name string, snap int) error {
	c := &tap{ch: make(chan tapped, captureDepth), snap: snap}
	if err := t.add(c); err != nil {
		return err
	}
	defer t.remove(c)
	buf := pcapng.AppendHeader(nil, "ipoibcmd")
	buf = pcapng.AppendInterface(buf, pcapng.Interface{Name: name, SnapLen: snap,
		Description: "RoCEv2 packets of the agent; Ethernet addresses are synthetic"})
	for {
		if _, err := w.Write(buf); err != nil {
			return nil // the client has left
		}
		flush()
		select {
		case p := <-c.ch:
			c.taken(&p)
			buf = pcapng.AppendPacket(buf[:0], 0, p.at, p.out, p.ip, p.n, snap)
		case <-ctx.Done():
			return nil
		}
	}
}
