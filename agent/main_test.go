package agent

import (
	"testing"

	"ipoibcm/internal/ownnet"
)

// The tests run in a network namespace of their own.
func TestMain(m *testing.M) { ownnet.Main(m, nil) }
