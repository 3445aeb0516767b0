package gateway_test

import (
	"crypto/x509"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

func roots(t *testing.T, pem []byte) *x509.CertPool {
	t.Helper()
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		t.Fatal("no certificate")
	}
	return pool
}

func connectClient(r *rig, opts ...connect.ClientOption) carrelv1connect.UserServiceClient {
	return carrelv1connect.NewUserServiceClient(r.http, r.url, opts...)
}

// listeners returns the TCP ports on which this very process listens, as the kernel tells (proc(5): net/tcp, state 0A).
func listeners(t *testing.T) []string {
	t.Helper()
	inodes := map[string]bool{}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(target, "socket:[") {
			inodes[strings.Trim(target, "socket:[]")] = true
		}
	}
	found := []string{}
	for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		content, err := os.ReadFile(table)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(content), "\n")[1:] {
			if f := strings.Fields(line); len(f) > 9 && f[3] == "0A" && inodes[f[9]] {
				found = append(found, f[1])
			}
		}
	}
	return found
}
