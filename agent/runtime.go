package agent

import (
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"sync"

	"ipoibcm/control"
	"ipoibcm/verbs"
)

// collecting lets one client at a time ask for collections.
var collecting sync.Mutex

// viewRuntime has the provider trim, collects garbage, gives free memory back to the kernel and counts what
// is left. It does not run on the driver's goroutine, so the driver goes on meanwhile.
func (a *Agent) viewRuntime(*http.Request) (control.Runtime, error) {
	collecting.Lock()
	defer collecting.Unlock()
	if p, ok := a.opt.Provider.(verbs.Trimmer); ok {
		p.Trim()
	}
	runtime.GC() // twice: what finalizers and pools hold goes with the second
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	r := control.Runtime{Version: control.Version, Goroutines: runtime.NumGoroutine(), HeapOctets: m.HeapAlloc,
		HeapObjects: m.HeapObjects}
	if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
		r.Descriptors = len(fds) - 1 // without the one that ReadDir opened
	}
	return r, nil
}
