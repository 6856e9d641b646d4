package softroce

import (
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/verbs/regions"
)

// A memory gives the engine access to the registered regions. The engine accesses them for
// peers under the lock of a queue pair. Deregister takes each such lock once, and so waits
// for accesses that have begun.
type memory struct{ regions.Table }

var _ engine.Memory = (*memory)(nil)

// Lookup implements [engine.Memory].
func (m *memory) Lookup(rkey uint32, va uint64, n int, access verbs.Access) ([]byte, bool) {
	b, why := m.Find(rkey, va, uint64(n), access)
	return b, why == regions.Found
}
