package rpcrdma

import "time"

const (
	// VersionCacheSize is how many peers a [VersionCache] remembers at most.
	VersionCacheSize = 1024
	// VersionCacheTime is how long a VersionCache remembers what it learned of a peer.
	VersionCacheTime = 10 * time.Minute
)

// A VersionCache remembers which version a peer speaks, so that the peer does not refuse the
// client's first message on every connection (draft section 6.2). The zero value is empty.
type VersionCache struct {
	peers map[string]cachedVersion
	// Evicted counts peers that were forgotten early because there were too many.
	Evicted uint64
}

type cachedVersion struct {
	version Version
	until   time.Time
}

// Learn remembers the version of peer that the action [Learned] gives. It forgets the peer if that
// is version two, which a client offers first anyway, or none: the peer may be upgraded meanwhile.
func (c *VersionCache) Learn(peer string, now time.Time, l Learned) {
	if l.Version != Version1 {
		delete(c.peers, peer)
		return
	}
	if _, known := c.peers[peer]; !known && len(c.peers) >= VersionCacheSize {
		c.evict(now)
	}
	if c.peers == nil {
		c.peers = map[string]cachedVersion{}
	}
	c.peers[peer] = cachedVersion{l.Version, now.Add(VersionCacheTime)}
}

// evict forgets the peer whose time ends first. Of several it takes the one whose name sorts first.
func (c *VersionCache) evict(now time.Time) {
	victim, until := "", time.Time{}
	for p, v := range c.peers {
		if until.IsZero() || v.until.Before(until) || v.until.Equal(until) && p < victim {
			victim, until = p, v.until
		}
	}
	if now.Before(until) {
		c.Evicted++
	}
	delete(c.peers, victim)
}

// Start returns the version to offer to peer first. Zero means the highest (see Options.Start).
func (c *VersionCache) Start(peer string, now time.Time) Version {
	if v, known := c.peers[peer]; known && now.Before(v.until) {
		return v.version
	}
	delete(c.peers, peer)
	return 0
}
