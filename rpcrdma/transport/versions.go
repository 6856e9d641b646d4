package transport

import (
	"sync"
	"time"

	"ipoibcm/rpcrdma"
)

// Versions remembers the version that each peer speaks ([rpcrdma.VersionCache]). The zero value is empty.
// Versions is safe for concurrent use.
type Versions struct {
	mu    sync.Mutex
	cache rpcrdma.VersionCache
}

// start returns the version to offer to peer first. A nil v knows nothing of any peer, and no v knows a
// peer without a name.
func (v *Versions) start(peer string) rpcrdma.Version {
	if v == nil || peer == "" {
		return 0
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.cache.Start(peer, time.Now())
}

// learn remembers what the machine of a client has learned of peer.
func (v *Versions) learn(peer string, l rpcrdma.Learned) {
	if v == nil || peer == "" {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cache.Learn(peer, time.Now(), l)
}
