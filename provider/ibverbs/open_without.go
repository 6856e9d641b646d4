//go:build !ibverbs || !cgo

package ibverbs

import "ipoibcm/verbs"

// Built says that this program has libibverbs.
const Built = false

// Open always fails with [ErrNotBuilt].
func Open(Options) (verbs.Provider, error) { return nil, ErrNotBuilt }
