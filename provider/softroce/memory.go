package softroce

import (
	"ipoibcm/provider/softroce/engine"
	"ipoibcm/verbs"
	"ipoibcm/verbs/regions"
)

// A memory is the registered regions as the engine sees them. Access by peers
// happens under the lock of a queue pair, which is what Deregister waits for.
type memory struct{ regions.Table }

var _ engine.Memory = (*memory)(nil)

// Lookup implements [engine.Memory].
func (m *memory) Lookup(rkey uint32, va uint64, n int, access verbs.Access) ([]byte, bool) {
	b, why := m.Find(rkey, va, uint64(n), access)
	return b, why == regions.Found
}
