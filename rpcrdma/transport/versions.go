package transport

import (
	"errors"
	"sync"
	"time"

	"ipoibcm/rpcrdma"
)

// ErrNoVersion is the error of a client whose peer had no version in common with it when it was last
// asked, less than [rpcrdma.VersionCacheTime] ago.
var ErrNoVersion = errors.New("the peer speaks no version of RPC-over-RDMA that we speak")

// Versions remembers the version that each peer speaks ([rpcrdma.VersionCache]). The zero value is empty.
// Versions is safe for concurrent use.
type Versions struct {
	mu    sync.Mutex
	cache rpcrdma.VersionCache
}

// start returns the version to offer to peer first. A nil v knows nothing of any peer.
func (v *Versions) start(peer string) (rpcrdma.Version, error) {
	if v == nil {
		return 0, nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	start, ok := v.cache.Start(peer, time.Now())
	if !ok {
		return 0, ErrNoVersion
	}
	return start, nil
}

// learn remembers what the machine of a client has learned of peer.
func (v *Versions) learn(peer string, l rpcrdma.Learned) {
	if v == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cache.Learn(peer, time.Now(), l)
}
