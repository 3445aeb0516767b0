package docker_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"testing"
)

// layerOf packs one file as a layer, and returns the digest of what was packed.
func layerOf(t *testing.T, content []byte) (packed []byte, diffID string) {
	t.Helper()
	var plain, out bytes.Buffer
	w := tar.NewWriter(&plain)
	err := w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg})
	if err == nil {
		_, err = w.Write(content)
	}
	err = errors.Join(err, w.Close())
	z := gzip.NewWriter(&out)
	_, errZip := z.Write(plain.Bytes())
	if err = errors.Join(err, errZip, z.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes(), fmt.Sprintf("sha256:%x", sha256.Sum256(plain.Bytes()))
}
