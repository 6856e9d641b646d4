//go:build !ibverbs || !cgo

package ibverbs

import "ipoibcm/verbs"

// Built is true if this program was built with libibverbs.
const Built = false

// Open always fails with [ErrNotBuilt].
func Open(Options) (verbs.Provider, error) { return nil, ErrNotBuilt }
