package ipoib

import (
	"iter"
	"slices"
	"time"

	"ipoibcm/ib"
	"ipoibcm/neigh"
	"ipoibcm/ratelimit"
	"ipoibcm/wire/encap"
)

// Bounds of the copies that are sent instead of multicast.
const (
	// copyRate is how many copies this host sends in a second, copyOctets how many octets of
	// copies. copyBurst is how many copies leave at once. Further copies wait.
	copyRate   = 10_000
	copyOctets = 32 << 20
	copyBurst  = 64
	// copyShare is the largest share of one processor that copies take, as the driver measures it
	// (CopiesTook): a slow machine sends fewer. copyTimeBurst is the processor time in seconds that copies
	// may take at once, so that a single question to everybody leaves at copyRate on slow machines too.
	copyShare     = 0.1
	copyTimeBurst = 0.05
	// kernelCost is how many copies one copy of a kernel packet counts as: a program that
	// floods a group gets half the rate of address resolution.
	kernelCost = 2
	// copyTick is how often waiting copies are looked at. In between the machine does
	// all else: an answer to the first copy does not wait for the last. If only packets of the kernel
	// wait, kernelTick applies, because each look wakes a thread.
	copyTick   = time.Millisecond
	kernelTick = 5 * time.Millisecond
	// maxWaitingCopies is how many packets of each class may wait. maxKernelCopies is how many
	// copies of kernel packets may wait, because such a packet is of little use some seconds later.
	// One kernel packet may always wait.
	maxWaitingCopies = 128
	maxKernelCopies  = 16_384
)

// A copyClass orders packets that wait to be copied: the highest class goes first.
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
	time    ratelimit.Bucket // processor time in seconds
	at      time.Time        // when drainCopies last ran
	turn    int              // index of the waiting packet whose turn is next
	class   copyClass        // of the packet that is sent now
	held    bool             // as the last HoldGroups said

	// sent is how many copies the next CopiesTook is about, and cost their sum with kernelCost.
	sent, cost float64
	told       bool // CopiesTook came: the next copy begins both anew
}

// Each yields every copy as a SendUD with a frame of its own.
func (s SendCopies) Each() iter.Seq[SendUD] {
	return func(yield func(SendUD) bool) {
		for _, gid := range s.To {
			if !yield(SendUD{Link: encap.LinkAddr{QPN: ib.QPNMulticast, GID: gid}, Frame: slices.Clone(s.Frame)}) {
				return
			}
		}
	}
}

// A copyJob is one packet and the members that are still to get it.
type copyJob struct {
	frame []byte
	to    []ib.GID
}

// encapMax bounds the octets of a frame of the UD QP.
const encapMax = 4096 + encap.HeaderLen

// len returns how many packets wait.
func (c *copies) len() (n int) {
	for _, q := range c.waiting {
		n += len(q)
	}
	return n
}

// deadline returns when drainCopies is to run next; zero if no copies wait.
func (c *copies) deadline() time.Time {
	switch n := c.len(); n {
	case 0:
		return time.Time{}
	case len(c.waiting[copyOther]):
		return c.at.Add(kernelTick)
	}
	return c.at.Add(copyTick)
}

// takes reports whether a packet to n members may wait in a class.
func (c *copies) takes(class copyClass, n int) bool {
	q := c.waiting[class]
	if class != copyOther || len(q) == 0 {
		return len(q) < maxWaitingCopies
	}
	for i := range q {
		n += len(q[i].to)
	}
	return len(q) < maxWaitingCopies && n <= maxKernelCopies
}

// budget returns how many copies of size octets may be sent now.
func (c *copies) budget(now time.Time, cost float64, size int) int {
	if c.time.Left(now, copyShare, copyTimeBurst) <= 0 {
		return 0
	}
	packets := c.packets.Left(now, copyRate, copyBurst) / cost
	octets := c.octets.Left(now, copyOctets, copyBurst*encapMax) / (cost * float64(size))
	return int(min(packets, octets))
}

// spend charges n copies of size octets to the budget.
func (c *copies) spend(n int, cost float64, size int) {
	c.packets.Spend(cost * float64(n))
	c.octets.Spend(cost * float64(n*size))
	if c.told {
		c.sent, c.cost, c.told = 0, 0, false
	}
	c.sent, c.cost = c.sent+float64(n), c.cost+cost*float64(n)
}

// copiesTook charges the processor time d of the last copies to the budget.
func (f *Interface) copiesTook(d time.Duration) {
	c := &f.copies
	if c.sent > 0 {
		c.time.Spend(d.Seconds() * c.cost / c.sent)
	}
	c.told = true
}

// sendCopies sends a frame to each of peers, at once or as the budget allows.
func (f *Interface) sendCopies(peers []ib.GID, fr []byte) {
	c := &f.copies
	switch {
	case len(peers) == 0:
		return
	case !c.takes(c.class, len(peers)):
		f.count(dropCopies)
		return
	}
	c.waiting[c.class] = append(c.waiting[c.class], copyJob{frame: fr, to: peers})
	f.drainCopies()
}

// drainCopies sends the copies that may be sent now, highest class first.
func (f *Interface) drainCopies() {
	f.copies.at = f.now
	for class := copyClasses; class > 0; class-- {
		if !f.drainClass(class - 1) {
			f.count(nCopiesWaited)
			break
		}
	}
	f.holdGroups()
}

// drainClass sends the copies of a class that may be sent now, and reports whether none is left.
func (f *Interface) drainClass(class copyClass) bool {
	c := &f.copies
	q, cost := &c.waiting[class], 1.
	if class == copyOther {
		cost = kernelCost
	}
	for len(*q) > 0 {
		// Packets take turns, copy by copy: a question does not wait for all copies of an earlier
		// one, which may have been answered. Packets of the kernel go one after the other.
		i, most := 0, len((*q)[0].to)
		if class != copyOther && len(*q) > 1 {
			i, most = c.turn%len(*q), 1
		}
		j := &(*q)[i]
		n := min(c.budget(f.now, cost, len(j.frame)), most)
		if n == 0 {
			return false
		}
		f.do(SendCopies{To: j.to[:n:n], Frame: j.frame})
		j.to = j.to[n:]
		c.spend(n, cost, len(j.frame))
		f.n[nCopies] += uint64(n)
		if c.turn = i + 1; len(j.to) == 0 {
			*q, c.turn = slices.Delete(*q, i, i+1), i
		}
	}
	return true
}

// holdGroups has the data path drop the kernel's packets to groups while there is no room for
// them here: to hand a packet up costs about as much as to send a copy.
func (f *Interface) holdGroups() {
	c := &f.copies
	peers, _ := f.group.Table().Replicate()
	held := len(peers) > 0 && !c.takes(copyOther, len(peers))
	if held != c.held {
		c.held = held
		f.do(HoldGroups{On: held})
	}
}
