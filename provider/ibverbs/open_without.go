//go:build !ibverbs || !cgo

package ibverbs

import "ipoibcm/verbs"

// Built says whether this program has libibverbs.
const Built = false

// Open always fails with [ErrNotBuilt].
func Open(Options) (verbs.Provider, error) { return nil, ErrNotBuilt }
