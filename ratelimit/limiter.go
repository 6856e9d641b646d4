// Package ratelimit keeps floods of packets with forged sources away from what is
// costly, and still lets honest sources through that are not known.
//
// A forged source is drawn anew for each packet and never asks twice. An honest source repeats itself,
// because ARP, ND and CM messages are all sent again. So a [Limiter] lets everybody pass while there is
// little to do. When unknown sources come faster than they may, most of them are turned away and
// remembered. Sources that come again within a few seconds pass by an allowance of their own. A single
// source gets no more than its share either way.
//
// Memory is fixed: bits are remembered, not sources, so a source is now and then taken for one that was
// there before. A decision costs some tens of nanoseconds, before anything of the packet has been copied or
// decoded.
//
// A Limiter has no clock and belongs to one caller at a time.
package ratelimit

import (
	"encoding/binary"
	"math/bits"
	"time"

	"ipoibcm/ib"
)

// Options are the allowances of a Limiter in packets per second. Twice as many may come at once.
type Options struct {
	Unknown   int // of sources that have not been there lately
	Returning int // of sources that have
	Source    int // of any single source
}

const (
	// shares is how many sources are counted at a time; a power of two.
	shares = 1024
)

// A Limiter decides which packets pass.
type Limiter struct {
	opt  Options
	keys [2]uint64

	unknown, returning bucket
	shares             []share
	met                Memory // sources that came when less than half of unknown was left
}

// A share counts the packets of one source within one second.
type share struct {
	tag    uint32
	count  uint32
	second int64
}

// A bucket holds tokens; its zero value is full.
type bucket struct {
	used float64
	at   int64
}

// New returns a Limiter. The keys keep others from knowing which sources it takes for the same; they should
// be random.
func New(o Options, keys [2]uint64) *Limiter {
	return &Limiter{opt: o, keys: keys, shares: make([]share, shares)}
}

// Allow reports whether a packet from src may pass at time now, in nanoseconds of
// any clock that runs on.
func (l *Limiter) Allow(now int64, src ib.GID) bool {
	h := hash(l.keys, src)
	if !l.inShare(now, h) {
		return false
	}
	l.unknown.refill(now, l.opt.Unknown)
	if l.unknown.used <= float64(l.opt.Unknown) { // at least half of it is left
		l.unknown.used++
		return true
	}
	if l.met.seen(now, h) {
		l.returning.refill(now, l.opt.Returning)
		if l.returning.take(l.opt.Returning) {
			return true
		}
	}
	return l.unknown.take(l.opt.Unknown)
}

// inShare counts a packet and reports whether its source is still within its share.
func (l *Limiter) inShare(now int64, h uint64) bool {
	s := &l.shares[h>>32%shares]
	if second := now / int64(time.Second); s.tag != uint32(h) || s.second != second {
		*s = share{tag: uint32(h), second: second}
	}
	s.count++
	return int(s.count) <= 2*l.opt.Source
}

func hash(keys [2]uint64, src ib.GID) uint64 {
	hi, lo := bits.Mul64(binary.BigEndian.Uint64(src[:8])^keys[0], binary.BigEndian.Uint64(src[8:])^keys[1])
	hi, lo = bits.Mul64(hi^lo^0x9e3779b97f4a7c15, keys[0]|1)
	return hi ^ lo
}

func (b *bucket) refill(now int64, rate int) {
	if d := now - b.at; d > 0 {
		b.used = max(0, b.used-float64(d)*float64(rate)/float64(time.Second))
	}
	b.at = now
}

// take takes one of 2 x rate tokens.
func (b *bucket) take(rate int) bool {
	if b.used+1 > float64(2*rate) {
		return false
	}
	b.used++
	return true
}
