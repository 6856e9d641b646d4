package peers

import (
	"testing"

	"ipoibcm/internal/ownnet"
)

func TestMain(m *testing.M) { ownnet.Main(m, nil) }
