package main

import (
	"os"
	"path/filepath"
	"strings"
	"time"

	"ipoibcm/control"
	"ipoibcm/sandbox"
)

// confine returns the function that gives up the rights that the process does not need once it serves. The
// configuration file, if there is one, stays readable, because a reload reads it again.
func (s *settings) confine(file string) func() ([]control.Protection, error) {
	// Provider ibverbs goes without Landlock. Landlock gives the process other credentials, with which
	// uverbs takes no writes on a descriptor that was opened before (include/rdma/ib.h,
	// ib_safe_file_access). So no datagram would leave rdma_rxe.
	o := sandbox.Options{User: s.user, SysAdmin: s.Netns != "",
		NoLandlock: !s.Sandbox.Landlock || s.Provider == ibVerbs, Socket: s.controlPath()}
	o.OwnFolder = filepath.Dir(o.Socket) == control.SocketDir
	switch {
	case !s.Sandbox.Seccomp:
		o.NoSeccomp = "switched off"
	case s.Provider == ibVerbs:
		o.NoSeccomp = "what the libraries of provider ibverbs call is not known"
	}
	o.ReadFiles, o.ConnectPorts = s.memberFiles(s.link)
	o.Names = s.link.named()
	for _, path := range []string{file, s.MetricsTLS, s.MetricsAuth} {
		if path != "" {
			o.ReadFiles = append(o.ReadFiles, path)
		}
	}
	o.Abstract = strings.HasPrefix(os.Getenv("NOTIFY_SOCKET"), "@")
	return func() ([]control.Protection, error) {
		_ = time.Now().Local().String() // reads the time zone now, in case no line of the log has done so yet
		parts, err := sandbox.Enter(o)
		if err != nil {
			return nil, err
		}
		var out []control.Protection
		for _, p := range parts {
			out = append(out, control.Protection(p))
		}
		return out, nil
	}
}
