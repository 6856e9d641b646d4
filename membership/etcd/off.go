//go:build noetcd

package etcd

import (
	"errors"

	"ipoibcm/membership"
)

// New returns an error: this build has no etcd.
func New(Config) (membership.Publisher, error) {
	return nil, errors.New("this program was built without etcd (build tag noetcd)")
}
