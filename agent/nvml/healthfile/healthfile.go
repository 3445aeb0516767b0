// Package healthfile keeps the health records of devices in a file.
package healthfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/carrel-dev/carrel/agent/gpu"
)

// File is a file of health records; its directory must exist.
type File struct{ path string }

var _ gpu.HealthStore = File{}

// New returns the file at path, which need not exist yet.
func New(path string) File { return File{path: path} }

// content is what the file holds.
type content struct {
	Version int                `json:"version"`
	Devices []gpu.HealthRecord `json:"devices"`
}

// Load returns the records, none where there is no file. A file that cannot be read is an error and never "all healthy".
func (f File) Load() ([]gpu.HealthRecord, error) {
	b, err := os.ReadFile(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var c content
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w; remove it to forget which devices failed", f.path, err)
	}
	if c.Version != 1 {
		return nil, fmt.Errorf("%s has version %d, this agent reads 1", f.path, c.Version)
	}
	return c.Devices, nil
}

// Save replaces the file as a whole: after a crash it holds the old records or the new ones.
func (f File) Save(records []gpu.HealthRecord) error {
	b, err := json.MarshalIndent(content{Version: 1, Devices: records}, "", " ")
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(f.path), filepath.Base(f.path)+".new*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(append(b, '\n'))
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), f.path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	return nil
}
