package ipoib

import (
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/neigh"
	"ipoibcm/ratelimit"
	"ipoibcm/wire/encap"
)

// Bounds of the copies that stand for multicast.
const (
	// copyRate and copyOctets are how many copies a second one host sends, and how many
	// octets; copyBurst is how many leave at once. What is beyond waits.
	copyRate   = 10_000
	copyOctets = 32 << 20
	copyBurst  = 64
	// kernelCost is what a copy of a packet of the kernel takes of them: half of the rate
	// leaves TCP nine tenths of what it had.
	kernelCost = 2
	// copyTick is how often those that wait are looked at. In between the machine does
	// all else: an answer to the first copy does not wait for the last.
	copyTick = time.Millisecond
	// maxWaitingCopies is how many packets of each class may wait.
	maxWaitingCopies = 128
)

// A copyClass says who goes first.
type copyClass uint8

const (
	copyOther copyClass = iota // packets of the kernel
	copyTell                   // detection of duplicates, announcements
	copyAsk                    // questions for which packets wait
	copyClasses
)

// classOf returns the class of a message of address resolution.
func classOf(to neigh.Dest) copyClass {
	if to.Later {
		return copyTell
	}
	return copyAsk
}

// copies spreads what goes to every member over time: a packet for a thousand members
// is a thousand packets. A host that floods its link still resolves, because questions
// go before all else.
type copies struct {
	waiting [copyClasses][]copyJob
	packets ratelimit.Bucket
	octets  ratelimit.Bucket
	at      time.Time // when they were looked at last
	turn    int       // of the packets that wait
	class   copyClass // of what is sent now
}

// A copyJob is one packet and who is still to get it.
type copyJob struct {
	frame []byte
	to    []ib.GID
}

// encapMax is more than any frame of the UD QP has, in octets.
const encapMax = 4096 + encap.HeaderLen

// len returns how many packets wait.
func (c *copies) len() (n int) {
	for _, q := range c.waiting {
		n += len(q)
	}
	return n
}

// deadline is when the next copies may be sent; zero if none wait.
func (c *copies) deadline() time.Time {
	if c.len() == 0 {
		return time.Time{}
	}
	return c.at.Add(copyTick)
}

// sendCopies sends a frame to each of peers, at once or bit by bit.
func (f *Interface) sendCopies(peers []ib.GID, fr []byte) {
	q := &f.copies.waiting[f.copies.class]
	switch {
	case len(peers) == 0:
		return
	case len(*q) >= maxWaitingCopies:
		f.count(dropCopies)
		return
	}
	*q = append(*q, copyJob{frame: fr, to: peers})
	f.drainCopies()
}

// drainCopies sends what may be sent now.
func (f *Interface) drainCopies() {
	c := &f.copies
	c.at = f.now
	for class := copyClasses; class > 0; class-- {
		q, cost := &c.waiting[class-1], 1.
		if class-1 == copyOther {
			cost = kernelCost
		}
		for len(*q) > 0 {
			// In turn: a question does not wait for all copies of the one before, which
			// may have been answered.
			i := c.turn % len(*q)
			j := &(*q)[i]
			size := cost * float64(len(j.frame))
			if c.packets.Left(f.now, copyRate, copyBurst) < cost || c.octets.Left(f.now, copyOctets, copyBurst*encapMax) < size {
				f.count(nCopiesWaited)
				return
			}
			f.do(SendUD{Link: encap.LinkAddr{QPN: ib.QPNMulticast, GID: j.to[0]}, Frame: slices.Clone(j.frame)})
			j.to = j.to[1:]
			c.packets.Spend(cost)
			c.octets.Spend(size)
			f.count(nCopies)
			if c.turn = i + 1; len(j.to) == 0 {
				*q, c.turn = slices.Delete(*q, i, i+1), i
			}
		}
	}
}
