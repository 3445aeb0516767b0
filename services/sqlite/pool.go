package sqlite

import (
	"context"

	"github.com/carrel-dev/carrel/services/fleet"
)

const poolColumns = `pool.name, pool.description, pool.default_image, pool.sudo, pool.is_default, pool.max_gpus_per_workspace, pool.default_cpu_millis, pool.default_memory_mib`

func scanPool(s scanner) (p fleet.Pool, err error) {
	err = s.Scan(&p.Name, &p.Description, &p.DefaultImage, &p.Sudo, &p.Default, &p.MaxGPUsPerWorkspace, &p.DefaultCPUMillis, &p.DefaultMemoryMiB)
	return p, err
}

// Pools returns all pools by name.
func (db *DB) Pools(ctx context.Context) (pools []fleet.Pool, err error) {
	err = db.read(ctx, func(t *tx) error {
		pools, err = all(t, scanPool, `SELECT `+poolColumns+` FROM pool ORDER BY name`)
		return err
	})
	return pools, err
}

// Pool returns one; an empty name means the default one. KindNotFound.
func (db *DB) Pool(ctx context.Context, name string) (p fleet.Pool, err error) {
	err = db.read(ctx, func(t *tx) error {
		p, err = t.poolByName(name)
		return err
	})
	return p, err
}

func (t *tx) poolByName(name string) (fleet.Pool, error) {
	p, err := scanPool(t.row(`SELECT `+poolColumns+` FROM pool WHERE name = ?1 OR (?1 = '' AND is_default = 1)`, name))
	if isNoRows(err) {
		return p, fleet.Errorf(fleet.KindNotFound, "there is no pool %q; `carrel pool ls` shows all", clip(name))
	}
	return p, err
}

// CreatePool makes a pool. KindExists.
func (db *DB) CreatePool(ctx context.Context, p fleet.Pool) error {
	if err := checkPool(&p); err != nil {
		return err
	}
	return db.write(ctx, fromMillis(0), func(t *tx) error {
		if err := t.oneDefaultPool(&p); err != nil {
			return err
		}
		err := t.exec(`INSERT INTO pool (name, description, default_image, sudo, is_default, max_gpus_per_workspace, default_cpu_millis, default_memory_mib) VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
			p.Name, p.Description, p.DefaultImage, p.Sudo, p.Default, p.MaxGPUsPerWorkspace, p.DefaultCPUMillis, p.DefaultMemoryMiB)
		if isUnique(err) {
			return fleet.Errorf(fleet.KindExists, "there is a pool %s already", p.Name)
		}
		return err
	})
}

func checkPool(p *fleet.Pool) error {
	if err := fleet.CheckName("pool", p.Name); err != nil {
		return err
	}
	if p.MaxGPUsPerWorkspace < 0 || p.DefaultCPUMillis < 0 || p.DefaultMemoryMiB < 0 {
		return fleet.Errorf(fleet.KindInvalid, "pool %s: limits and sizes must not be negative; 0 means none", p.Name)
	}
	return nil
}

// oneDefaultPool takes the mark from the present default pool when another gets it.
func (t *tx) oneDefaultPool(p *fleet.Pool) error {
	if !p.Default {
		return nil
	}
	return t.exec(`UPDATE pool SET is_default = 0 WHERE is_default = 1 AND name <> ?`, p.Name)
}

// UpdatePool changes a pool; the name stays. KindConflict when no pool would be the default. Hosts of its runs get a new generation.
func (db *DB) UpdatePool(ctx context.Context, name string, change func(*fleet.Pool) error) (p fleet.Pool, err error) {
	err = db.write(ctx, fromMillis(0), func(t *tx) error {
		if p, err = t.poolByName(name); err != nil {
			return err
		}
		before := p
		if err := change(&p); err != nil {
			return err
		}
		p.Name = before.Name
		if err := checkPool(&p); err != nil {
			return err
		}
		if before.Default && !p.Default {
			return fleet.Errorf(fleet.KindConflict, "pool %s is the default; make another pool the default instead", name)
		}
		if err := t.oneDefaultPool(&p); err != nil {
			return err
		}
		err = t.exec(`UPDATE pool SET description = ?, default_image = ?, sudo = ?, is_default = ?, max_gpus_per_workspace = ?, default_cpu_millis = ?, default_memory_mib = ? WHERE name = ?`,
			p.Description, p.DefaultImage, p.Sudo, p.Default, p.MaxGPUsPerWorkspace, p.DefaultCPUMillis, p.DefaultMemoryMiB, p.Name)
		if err != nil || before.Sudo == p.Sudo {
			return err
		}
		return t.exec(`UPDATE host SET generation = generation + 1 WHERE pool = ?`, p.Name)
	})
	return p, err
}
